"""What a parameter is, from its name alone. The only place that parses parameter names, and it needs no torch.

A name is either inside a trunk (`image.blocks.3.attention.query.segments.1.key_tokens`; a language model's trunk has no
prefix) or one of the ends that its model declares (`embedding.weight`). Any other name is an error: otherwise chance
would decide how that parameter is initialised, decayed and sharded.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenformer.errors import UserError


class Role(NamedTuple):
    """How a parameter is initialised and trained.

    `key`, `value`: parameter tokens. `inward`, `outward`: matrices that read from and write to the residual stream.
    Muon trains these four. `table`: embedding or head, with weight decay. `position`: drawn like a table, without
    decay. `one`, `zero`: begin there, without decay. `own`: begins at `start`, without decay.
    """

    kind: str
    start: float = 0.0

    @property
    def matrix(self) -> bool:
        """Whether Muon updates it."""
        return self.kind in ("key", "value", "inward", "outward")

    @property
    def decays(self) -> bool:
        return self.matrix or self.kind == "table"

    @property
    def drawn(self) -> bool:
        """Whether it begins with random numbers."""
        return self.decays or self.kind == "position"


INWARD = Role("inward")
TABLE = Role("table")
POSITION = Role("position")
ONE = Role("one")
ZERO = Role("zero")


def own(start: float) -> Role:
    """The role of a number that begins at `start`, such as a learned temperature."""
    return Role("own", start)


class Name(NamedTuple):
    """A parsed name. Outside the blocks, `layer` and `segment` are None and `trunk` is empty."""

    trunk: str
    layer: int | None
    part: str  # attention.query, ffn, ffn.up, attention_norm; outside the blocks, all before the leaf
    segment: int | None
    leaf: str  # key_tokens, value_tokens, weight, bias
    role: Role

    @property
    def text(self) -> str:
        """The whole name; `name._replace(layer=4).text` is the same parameter of another layer."""
        block = "" if self.layer is None else f"{self.trunk}blocks.{self.layer}."
        segment = "" if self.segment is None else f"segments.{self.segment}."
        return f"{block}{self.part}{'.' if self.part else ''}{segment}{self.leaf}"

    @property
    def projection(self) -> str:
        """query, key, value, proj, ffn, up, gate, down; or the name of a norm."""
        return self.part.rpartition(".")[2]

    @property
    def token(self) -> bool:
        """Whether its rows are parameter tokens."""
        return self.segment is not None


_BLOCK = re.compile(r"((?:\w+\.)*)blocks\.(\d+)\.(.+)")
_LAYER = r"(attention\.(?:query|key|value|proj)|ffn"
_TOKENS = re.compile(_LAYER + r")\.segments\.(\d+)\.((key|value)_tokens)")
_MATRIX = re.compile(_LAYER + r"\.(?:gate|up|down)|attention_norm|ffn_norm)\.(weight|bias)")


def parse(name: str, ends: Mapping[str, Role]) -> Name:
    """Parse a name. `ends`: the parameters that the model declares outside its blocks.

    >>> name = parse("text.blocks.3.attention.query.segments.1.key_tokens", {})
    >>> name.trunk, name.layer, name.part, name.segment, name.role.kind
    ('text.', 3, 'attention.query', 1, 'key')
    >>> parse("scale", {"scale": own(2.66)}).role.start
    2.66
    """
    if name in ends:
        part, _, leaf = name.rpartition(".")
        return Name("", None, part, None, leaf, ends[name])
    if block := _BLOCK.fullmatch(name):
        trunk, layer, rest = block[1], int(block[2]), block[3]
        if tokens := _TOKENS.fullmatch(rest):
            return Name(trunk, layer, tokens[1], int(tokens[2]), tokens[3], Role(tokens[4]))
        if matrix := _MATRIX.fullmatch(rest):
            return Name(trunk, layer, matrix[1], None, matrix[2], _role(matrix[1], matrix[2]))
    known = ", ".join(ends) or "none"
    raise ValueError(f"'{name}' is neither a parameter of a trunk nor among the ends that its model declares ({known})")


def refuse_foreign(model: Any) -> None:
    """Refuse a model into which another library has put parameters or wrappers, which readers would leave out."""
    for name, _ in model.named_parameters():
        try:
            parse(name, model.ends)
        except ValueError:
            do = "merge it (peft: merge_and_unload) or remove it first"
            raise UserError(f"'{name}' is not the model's own, another library put it there: {do}") from None


def _role(part: str, leaf: str) -> Role:
    if leaf == "bias":
        return ZERO
    if part.endswith("norm"):
        return ONE
    return Role("outward") if part in ("attention.proj", "ffn.down") else INWARD
