"""Downloads models by huggingface_hub: cached, and resumed when the connection breaks."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenformer.errors import UserError

WANTED = ["*.json", "*.yml", "*.bin", "*.safetensors", "*.pt", "latest", "*/latest"]


def snapshot(name: str, revision: str | None = None) -> Path:
    """Announce and return a local copy of a hub repository such as `Haiyang-W/TokenFormer-150M`."""
    from huggingface_hub import snapshot_download

    if os.environ.get("RANK", "0") == "0":
        print(f"{name}: no local path, so the hub is asked ({revision or 'newest revision'})", file=sys.stderr)
    with asking(name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED))


@contextlib.contextmanager
def asking(name: str, revision: str | None) -> Iterator[None]:
    """Refuse in a sentence what the hub does not have, and a connection that breaks."""
    from huggingface_hub import errors

    try:
        yield
    except errors.RevisionNotFoundError:
        raise UserError(f"the hub's model '{name}' has no revision '{revision}': check it") from None
    except errors.HFValidationError:
        raise UserError(f"'{name}' is neither a path here nor a name that the hub could have: check it") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"the hub has no model '{name}' that you may read: check the name, or log in") from None
    except errors.LocalEntryNotFoundError:
        raise UserError(
            f"'{name}' is neither a path here nor in the local hub cache, and the hub cannot be reached: "
            "go online, or give the path of a copy"
        ) from None
    except (errors.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the download of '{name}' broke off ({reason}): run it again, whole files are kept") from None
