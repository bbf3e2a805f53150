"""What our classes of transformers have in common: adapters, and saving with the file that needs no package of ours.

Unusual: adapters of this package and those of peft have the same methods, which transformers made for peft's; a name
belongs to one of them. `hub/remote.py` leaves out what needs the package (its `LEFT_OUT`).
"""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenformer.adapters import active, attach, check_active, detached, remove
from tokenformer.config_model import unlike
from tokenformer.errors import UserError
from tokenformer.files import MANIFEST, write_text
from tokenformer.hub.remote import FILE, MAPS, modeling_source

try:
    from transformers import PreTrainedModel
    from transformers.utils import find_adapter_config_file
except ImportError as error:
    raise UserError(f"transformers 5.17 or newer is needed here ({error}): pip install 'tokenformer[hf]'") from None


WHERE = ("subfolder", "revision", "token", "cache_dir", "local_files_only")  # how transformers finds a config


def of_peft(source: Any, **where: Any) -> str | None:
    """Return the config of the adapter of peft in a folder, or in a repository of the hub; None where there is none.

    A name that can only be a mistyped path is not looked up on the hub, which is asked several times when it is far.
    """
    named = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", str(source))
    could = os.path.isdir(source) or (named and not os.path.isdir(named[1]))
    return find_adapter_config_file(source, **where) if could else None


def refuse_edited(folder: Any, subfolder: str | None = None) -> None:
    """Refuse a config.json other than the one that our manifest lists: the same weights may compute something else."""
    config = Path(str(folder), subfolder or "", "config.json")
    manifest = config.with_name(MANIFEST)
    if not (config.is_file() and manifest.is_file()):
        return
    listed, digest = manifest.read_bytes(), hashlib.sha256(config.read_bytes()).hexdigest()
    if b'"config.json"' in listed and b'"sha256"' in listed and digest.encode() not in listed:
        do = f"get the folder anew, or delete its {manifest.name} if you changed it yourself"
        raise UserError(f"{config} was changed since the folder was written, so it may not fit the weights: {do}")


def warn_of_others(given: Any, stored: Any) -> None:
    """Say which keys of a config that was given are not those of the weights, though every shape fits."""
    for name, ours, theirs in unlike(given, stored):
        do = f"leave {name} out, unless you mean it"
        warnings.warn(
            f"{name} is {ours} here but {theirs} in the config beside the weights, so the same tensors compute "
            f"something else: {do}",
            stacklevel=3,
        )


class TokenFormerPreTrainedModel(PreTrainedModel):
    """A model of transformers around a native one, `self.inner`."""

    model: Any

    @property
    def inner(self) -> Any:
        return self.model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        given = [word for word in ("quantization_config", "load_in_8bit", "load_in_4bit") if kwargs.get(word)]
        if given:
            raise UserError(
                f"{given[0]} is given, but such methods replace Linear layers, and a TokenFormer's parameters are "
                "tokens: leave it out, and give dtype=torch.bfloat16 for half the memory"
            )
        refuse_edited(pretrained_model_name_or_path, kwargs.get("subfolder"))
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if pretrained_model_name_or_path is not None:
            with contextlib.suppress(OSError):  # weights without a config of their own
                where = {word: kwargs[word] for word in WHERE if word in kwargs}
                stored = cast(Any, cls.config_class).from_pretrained(pretrained_model_name_or_path, **where)
                model = loaded[0] if isinstance(loaded, tuple) else loaded
                warn_of_others(model.config.to_native().resolved(), stored.to_native().resolved())
        return loaded

    def load_adapter(
        self, peft_model_id: Any = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter, of this package or of peft, from a folder or the hub. It counts from then on, and alone.

        Load one of this package before the model is cast to another type. `set_adapter` lets several count.
        """
        name = adapter_name or "default"
        if not isinstance(name, str):
            raise UserError(f"adapter_name is {str(name)[:80]}, which is no name: give a word (a str)")
        theirs = None if peft_model_id is None else of_peft(peft_model_id, **(kwargs.get("adapter_kwargs") or {}))
        if peft_model_id is None or theirs:
            if name in self._ours:
                raise UserError(f"the model has an adapter '{name}' already: give the new one another name")
            self._refuse_copies(getattr(kwargs.get("peft_config"), "modules_to_save", None))
            if theirs:
                with contextlib.suppress(ValueError, AttributeError):  # transformers says what is wrong with the file
                    self._refuse_copies(json.loads(Path(theirs).read_text(encoding="utf-8")).get("modules_to_save"))
            loaded = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
            if self._ours:
                self.set_adapter(name)
            return loaded
        if not hasattr(self, "_attach"):
            raise UserError(
                f"{peft_model_id} is no adapter of peft, and one of TokenFormer needs the package, not its remote "
                "code: pip install tokenformer, import tokenformer.hub.hf and load the model anew"
            )
        if name in getattr(self, "peft_config", {}):
            raise UserError(f"the model has an adapter '{name}' already: give the new one another name")
        for word, value in kwargs.items():
            if value and word not in ("low_cpu_mem_usage", "local_files_only"):
                raise UserError(f"{peft_model_id} is an adapter of TokenFormer, which knows no {word}: leave it out")
        return self._attach(peft_model_id, name)

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Make a new adapter of peft."""
        name = adapter_name or "default"
        if name in self._ours:
            raise UserError(f"the model has an adapter '{name}' already: give the new one another name")
        self._refuse_copies(getattr(adapter_config, "modules_to_save", None))
        super().add_adapter(adapter_config, adapter_name)

    def _refuse_copies(self, modules: Any) -> None:
        """Refuse modules of which peft is to compute with a copy (`modules_to_save`), where our adapters reach in."""
        if not self._ours or not isinstance(modules, list | tuple | set):
            return
        reached = list(getattr(self.inner, "base_values", {}))
        reached += [n for n, m in self.inner.named_modules() if set(getattr(m, "switch", ())) & set(self._ours)]
        for path in reached:
            parts = path.split(".")
            for word in modules:
                if any(f"model.{'.'.join(parts[:i])}".endswith(str(word)) for i in range(1, len(parts) + 1)):
                    raise UserError(
                        f"modules_to_save names '{word}', so peft would compute with a copy of '{path}', which an "
                        f"adapter here changes ({', '.join(self._ours)}): leave it out, or call delete_adapter first"
                    )

    @property
    def _ours(self) -> dict[str, Any]:
        """The adapters of this package that are attached, by name."""
        return getattr(self.inner, "adapters", {})

    def _attach(self, folder: Any, name: str) -> None:
        check_active(self.inner, {})  # the new one counts alone
        attach(self.inner, folder, name)
        self.set_adapter(name)

    def set_adapter(self, adapter_name: Mapping[str, float] | list[str] | str) -> None:
        """Let these adapters count and no others, with weight 1; a mapping gives other weights to those of ours."""
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        weights = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
        ours = {name: weight for name, weight in weights.items() if name in self._ours}
        theirs = [name for name in weights if name not in self._ours]
        for name in theirs:
            if weights[name] != 1:
                raise UserError(f"the weight of '{name}' is {weights[name]}, but one of peft counts as it is: give 1")
        loaded = self._hf_peft_config_loaded
        check_active(self.inner, weights if self._ours and not loaded else ours)  # before anything is changed
        if theirs:
            super().set_adapter(theirs)
            super().enable_adapters()
        elif loaded:
            super().disable_adapters()
        active(self.inner, ours)
        self._disabled = None

    def _theirs_count(self) -> bool:
        """Tell whether adapters of peft are there and not disabled."""
        if not self._hf_peft_config_loaded:
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        return any(isinstance(m, BaseTunerLayer) and not m.disable_adapters for m in self.modules())

    def disable_adapters(self) -> None:
        """Compute the base until `enable_adapters` or `set_adapter`."""
        now = self._theirs_count(), dict(self.inner.active)
        active(self.inner, {})
        if self._hf_peft_config_loaded or not self._ours:
            super().disable_adapters()
        if any(now) or getattr(self, "_disabled", None) is None:  # given again, it forgets nothing
            self._disabled = now

    def enable_adapters(self) -> None:
        """Let the adapters count that did so before `disable_adapters`, with their weights."""
        theirs, ours = getattr(self, "_disabled", None) or (not self.inner.active, {})
        if not self.inner.active:
            active(self.inner, {name: weight for name, weight in ours.items() if name in self._ours})
        if theirs and (self._hf_peft_config_loaded or not self._ours):
            super().enable_adapters()
        self._disabled = None

    def active_adapters(self) -> list[str]:
        """Return the names of the adapters that count; those of peft also while they are disabled."""
        theirs = super().active_adapters() if self._hf_peft_config_loaded else []
        return [*theirs, *self.inner.active]

    def delete_adapter(self, adapter_names: list[str] | str) -> None:
        """Take adapters out of the model."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        theirs = [name for name in names if name not in self._ours]
        known = [*self._ours, *getattr(self, "peft_config", {})]
        for name in names if self._ours else ():
            if name not in known:
                raise UserError(f"the model has no adapter '{str(name)[:80]}': there are {', '.join(known)}")
        if len(theirs) < len(names):
            check_active(self.inner, {name: weight for name, weight in self.inner.active.items() if name not in names})
        if theirs or not self._ours:
            super().delete_adapter(theirs)
        for name in dict.fromkeys(names):
            if name in self._ours:
                remove(self.inner, name)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Write the modelling file too, so that the folder loads without our package.

        Adapters of peft are saved alone, as transformers does it; with those of this package alone nothing is saved.
        """
        if self._ours and not self._hf_peft_config_loaded:
            names = ", ".join(self._ours)
            raise UserError(
                f"adapters are attached ({names}), which lie in folders of their own: save the base after "
                "delete_adapter, or both as one model, tokenformer.save(tokenformer.adapters.merged(model.model), …)"
            )
        if is_main_process:
            write_text(Path(save_directory) / FILE, modeling_source(self.inner.config.of))
        self.config.auto_map = MAPS[self.inner.config.of]
        with detached(self.inner):  # transformers asks which adapters are active, and means peft's
            super().save_pretrained(save_directory, is_main_process, *args, **cast(Any, kwargs))
