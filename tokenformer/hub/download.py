"""Models from the Hugging Face hub, through huggingface_hub: cached, and resumed when the connection breaks."""

from pathlib import Path

from tokenformer.errors import UserError

WANTED = ["*.json", "*.yml", "*.bin", "*.safetensors", "*.pt", "latest", "*/latest"]


def snapshot(name: str) -> Path:
    """The local copy of a hub repository such as `Haiyang-W/TokenFormer-150M`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except HFValidationError:
        raise UserError(f"'{name}' is neither a path here nor a name that the hub could have: check it") from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model '{name}' that you may read: check the name, or log in") from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"'{name}' is neither a path here nor in the local hub cache, and the hub cannot be reached: "
            "go online, or give the path of a copy"
        ) from None
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the download of '{name}' broke off ({reason}): run it again, whole files are kept") from None
