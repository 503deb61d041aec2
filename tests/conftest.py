"""What every test may use: a home of its own, and the default model."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before any import of the project: tests share one home, so that what is slow to build is built once,
# and never touch the home of the person who runs them.
_home = Path(tempfile.gettempdir()) / f"localpaged-tests-{os.getuid()}"
_home.mkdir(mode=0o700, exist_ok=True)
os.environ["LOCALPAGED_HOME"] = str(_home)
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that wait for each other by spinning take many times as long when other work is on the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton kernels run in its interpreter; it reads this at its first import.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
for _name in [name for name in os.environ if name.startswith("LOCALPAGED_") and name != "LOCALPAGED_HOME"]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    from localpaged.models.locate import locate_model

    return locate_model(None).path


@pytest.fixture
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A LOCALPAGED_HOME with nothing in it."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LOCALPAGED_HOME", str(home))
    yield home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests last: from the first one on, Playwright keeps an event loop running in this thread."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of byte_model.py's model."""
    from byte_model import save_byte_model

    folder = tmp_path_factory.mktemp("byte-model")
    save_byte_model(folder)
    return folder


@pytest.fixture(scope="session")
def byte_reference(byte_model: Path) -> Any:
    """The same model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32).eval()


@pytest.fixture
def fresh() -> Any:
    """Random numbers of a new seed (torch.Generator); pytest shows the seed when the test fails."""
    import torch

    seed = secrets.randbits(32)
    print(f"generator seed {seed}")
    return torch.Generator().manual_seed(seed)
