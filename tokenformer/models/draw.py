"""What a language model reads to draw: a text, the id that begins a picture, and the codes of its pixels, row by row.

Legend: B batch, T tokens of a text, N codes of a picture, S = T + N.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.config_data import IGNORED
from tokenformer.ops.palette import Codes as Codes

SWITCH = "draw"  # of the segments and ids that count where something is drawn


def picture_sequences(
    ids_BT: Tensor, lengths_B: Tensor, codes_BN: Tensor, end: int, first: int
) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T + N): the end token, a text without its end, the id `first`, then codes. Only codes
    have labels. Texts are padded behind the picture, where nothing sees it.

    >>> texts, codes = torch.tensor([[7, 8, 0], [0, 0, 0]]), torch.tensor([[2, 1], [0, 3]])
    >>> [part.tolist() for part in picture_sequences(texts, torch.tensor([3, 1]), codes, 0, 100)]
    [[[0, 7, 8, 100, 103], [0, 100, 101, 104, 0]], [[-100, -100, -100, 103, 102], [-100, 101, 104, -100, -100]]]
    """
    drawn_BN = F.pad(codes_BN + 1, (1, 0)) + first
    there_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B[:, None]
    text_BT = F.pad(ids_BT, (1, -1), value=end).masked_fill(~there_BT, end)
    places_BN = lengths_B[:, None] + torch.arange(codes_BN.shape[1] + 1, device=ids_BT.device)
    ids_BS = F.pad(text_BT, (0, codes_BN.shape[1] + 1), value=end).scatter(1, places_BN, drawn_BN)[:, :-1]
    none_BS = torch.full_like(ids_BS, IGNORED)
    return ids_BS, none_BS.scatter(1, places_BN[:, :-1], drawn_BN[:, 1:])


def bare_pixels(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return normalised pixels (B, 3, H, W) as bytes (B, H, W, 3)."""
    mean_3, std_3 = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (mean, std))
    return ((x * std_3 + mean_3) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
