"""localpaged pull, list, show and rm, as a person runs them, against a hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, running
from tiny_models import save_model


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("tiny")
    save_model("qwen3", folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"tokenizer.json": b"{}", "pic.png": b"x"}
    gguf = default_model_path.read_bytes()[:400_000]
    repositories = {
        "tiny/qwen3": files,
        "tiny/ggufs": {"m-Q4_K_M.gguf": gguf, "m-Q8_0.gguf": gguf, "README.md": b"x"},
        "tiny/other": {"model.onnx": b"x"},
    }
    with running(Hub(repositories, gated={"tiny/gated"})) as hub:
        yield hub


def localpaged(hub: Hub, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"HF_ENDPOINT": hub.address, "LOCALPAGED_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "localpaged", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_pulled_model_is_listed_shown_and_removed(hub: Hub, tmp_path: Path) -> None:
    pulled = localpaged(hub, tmp_path, "pull", "tiny/qwen3", "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["name"] == "tiny/qwen3"
    assert "MB to fetch" in pulled.stderr
    assert "pic.png" not in hub.fetched
    listed = json.loads(localpaged(hub, tmp_path, "list", "--json").stdout)
    assert "tiny/qwen3" in [model["name"] for model in listed]
    shown = json.loads(localpaged(hub, tmp_path, "show", "qwen3", "--json").stdout)
    assert (shown["architecture"], shown["layers"]) == ("qwen3", 3)
    removed = localpaged(hub, tmp_path, "rm", "tiny/qwen3", "--yes")
    assert removed.stdout == "Removed tiny/qwen3.\n"
    assert not (tmp_path / "models" / "tiny").exists()


def test_one_file_of_a_gguf_repository_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.fetched.clear()
    assert localpaged(hub, tmp_path, "pull", "tiny/ggufs:Q8_0").returncode == 0
    assert hub.fetched == ["m-Q8_0.gguf"]
    hub.fetched.clear()
    assert localpaged(hub, tmp_path, "pull", "tiny/ggufs").returncode == 0
    assert hub.fetched == ["m-Q4_K_M.gguf"]


def test_an_interrupted_pull_is_not_listed_and_goes_on_with_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    hub.fetched.clear()
    hub.cut = {"model.safetensors"}
    first = localpaged(hub, tmp_path, "pull", "tiny/qwen3")
    if first.returncode != 0:
        names = [model["name"] for model in json.loads(localpaged(hub, tmp_path, "list", "--json").stdout)]
        assert "tiny/qwen3" not in names
        assert localpaged(hub, tmp_path, "pull", "tiny/qwen3").returncode == 0
    # Whether the transfer was taken up again at once or by the second call: each whole file came once.
    assert sorted(hub.fetched) == sorted(set(hub.fetched))
    weights = tmp_path / "models" / "tiny" / "qwen3" / "model.safetensors"
    assert weights.read_bytes() == hub.repositories["tiny/qwen3"]["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "tiny/none"], "no model tiny/none on the hub"),
        (["pull", "tiny/gated"], "gated"),
        (["pull", "tiny/qwen3", "--revision", "v9"], "no revision 'v9'"),
        (["pull", "tiny/other"], "neither .gguf nor .safetensors"),
        (["pull", "tiny/ggufs:Q3"], "Its files: m-Q4_K_M.gguf, m-Q8_0.gguf"),
        (["pull", "justaname"], "owner/name"),
        (["rm", "SmolLM2-135M-Instruct", "--yes"], "was not fetched by localpaged pull"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    hub: Hub, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = localpaged(hub, tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_hub_that_is_not_there_is_named_so(tmp_path: Path) -> None:
    result = localpaged(Hub({}, address="http://127.0.0.1:9"), tmp_path, "pull", "tiny/qwen3")
    assert result.returncode == 2
    assert "cannot be reached" in result.stderr
