"""Fetches models from a Hugging Face hub (HF_ENDPOINT names another one) and removes them.

A model is fetched into models/.incomplete and moved to its place when every file is there, so what
`localpaged list` shows is whole. Files that were finished are kept when a pull is interrupted.
"""

import shutil
from pathlib import Path
from typing import Any

from localpaged.errors import DownloadError
from localpaged.models.locate import LocatedModel, list_models, models_folder

# What a transformers checkpoint needs; other formats of the same weights are left alone.
FOLDER_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
PREFERRED_QUANTISATIONS = ("Q4_K_M", "Q5_K_M", "Q8_0", "Q4_0", "Q4_1", "Q6_K", "F16", "BF16", "F32")
SPARE_BYTES = 1 << 28


def pull_model(name: str, revision: str | None = None) -> LocatedModel:
    """Fetch owner/name, or owner/name:QUANT for one file of a GGUF repository; shows progress on stderr.

    Raises DownloadError with the remedy.
    """
    repository, _, quantisation = name.partition(":")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise DownloadError(f"{name!r} is no model of a hub. Write owner/name, for example Qwen/Qwen3-0.6B.")
    folder = models_folder() / repository
    staging = models_folder() / ".incomplete" / repository.replace("/", "--")
    files = _list_files(repository, revision, staging)
    patterns = _choose(repository, files, quantisation)
    _fetch(repository, revision, staging, patterns)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(staging.rglob("*")):
        # huggingface-hub's own notes on what it has fetched stay behind.
        if path.is_file() and ".cache" not in path.relative_to(staging).parts:
            path.replace(folder / path.name)
    shutil.rmtree(staging)
    chosen = [model for model in list_models() if model.path == folder or model.path.parent == folder]
    if quantisation:
        chosen = [model for model in chosen if quantisation.lower() in model.path.name.lower()] or chosen
    if not chosen:
        raise DownloadError(f"{repository} holds no model that runs here (no GGUF, no safetensors with config.json).")
    return chosen[0]


def remove_model(model: LocatedModel) -> None:
    """Delete a pulled model's files. Raises DownloadError for one that localpaged did not fetch."""
    folder = models_folder().resolve()
    path = model.path.resolve()
    if model.embedded or not path.is_relative_to(folder):
        raise DownloadError(f"{model.name} was not fetched by localpaged pull: remove {model.path} yourself.")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    for parent in path.parents:
        if parent == folder or any(parent.iterdir()):
            break
        parent.rmdir()


def _list_files(repository: str, revision: str | None, staging: Path) -> list[Any]:
    return list(_call(repository, revision, staging, None, dry_run=True))


def _choose(repository: str, files: list[Any], quantisation: str) -> list[str]:
    """The patterns of the files to fetch. Raises DownloadError that lists what there is."""
    ggufs = sorted(file.filename for file in files if file.filename.endswith(".gguf"))
    if not quantisation and any(file.filename.endswith(".safetensors") for file in files):
        return FOLDER_PATTERNS
    if not ggufs:
        raise DownloadError(f"{repository} has neither .gguf nor .safetensors files: it cannot run here.")
    for wanted in [quantisation] if quantisation else PREFERRED_QUANTISATIONS:
        found = [file for file in ggufs if wanted.lower() in file.lower()]
        if found:
            return found[:1]
    raise DownloadError(
        f"{repository} has no file for {quantisation or 'a known quantisation'!r}. Its files: {', '.join(ggufs)}. "
        f"Name one: localpaged pull {repository}:QUANTISATION."
    )


def _fetch(repository: str, revision: str | None, staging: Path, patterns: list[str]) -> None:
    planned = list(_call(repository, revision, staging, patterns, dry_run=True))
    missing = [file for file in planned if file.will_download]
    total = sum(file.file_size or 0 for file in missing)
    models_folder().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(models_folder()).free
    if total + SPARE_BYTES > free:
        raise DownloadError(
            f"{repository} needs {total / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {models_folder()}. "
            "Make room, or set LOCALPAGED_HOME to a larger disk."
        )
    have = len(planned) - len(missing)
    note = f", {have} already here" if have else ""
    _tell(f"{repository}: {len(planned)} files, {total / 1e6:,.1f} MB to fetch{note}")
    if missing:
        _call(repository, revision, staging, patterns, dry_run=False)
    for file in planned:
        path = staging / file.filename
        if not path.exists() or (file.file_size is not None and path.stat().st_size != file.file_size):
            raise DownloadError(f"{file.filename} did not arrive whole. Run the same command again; it goes on.")


def _tell(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False)


def _call(repository: str, revision: str | None, staging: Path, patterns: list[str] | None, *, dry_run: bool) -> Any:
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (disable_progress_bars if dry_run else enable_progress_bars)()
    try:
        if dry_run:
            # A dry run says only that it failed; this says why.
            HfApi().model_info(repository, revision=revision)
        return snapshot_download(
            repository, revision=revision, local_dir=staging, allow_patterns=patterns, dry_run=dry_run
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated: accept its terms on its page, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"There is no model {repository} on the hub. Check the name.") from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{repository} has no revision {revision!r}. Leave --revision out for main.") from error
    except OfflineModeIsEnabled as error:
        raise DownloadError("HF_HUB_OFFLINE is set, so nothing is fetched. Unset it.") from error
    except (LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise DownloadError("The hub cannot be reached. Check the connection, then run this again.") from error
    except HfHubHTTPError as error:
        raise DownloadError(f"The hub refused: {error}. Try again later.") from error
    except OSError as error:
        raise DownloadError(
            f"{repository} could not be fetched: {error}. Run it again; finished files stay."
        ) from error
