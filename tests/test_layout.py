"""The project's layout: links, packages without __init__.py, and imports that point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "localpaged"
LINKED = ("kernels", "models", "ui")
# Who may import whom, besides itself and what belongs to nobody.
COMMON = {"errors", "home", "", "log"}
ALLOWED = {
    "kernels": set(),
    "models": {"kernels"},
    "engine": {"kernels", "models"},
    "store": set(),
    "load": set(),
    "server": {"engine", "models", "store", "config"},
    "ui": {"server", "engine", "models", "store", "config"},
}
ENGINE_SIDE = ("kernels", "models", "engine")
WEB_PACKAGES = {"gradio", "fastapi", "starlette", "uvicorn", "sqlite_utils", "sqlite3"}
WITHOUT_TORCH = (
    "block_pool",
    "sequence",
    "kv_cache_manager",
    "leases",
    "scheduler",
    "messages",
    "sampling_params",
    "detokenizer",
)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts(modules: set[str]) -> set[str]:
    """Which parts of the project are among the modules."""
    ours = {module for module in modules if module.split(".")[0] == "localpaged"}
    return {module.split(".")[1] if "." in module else "" for module in ours}


@pytest.mark.parametrize("name", LINKED)
def test_the_package_is_a_relative_link_to_the_top_level(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    for path in sorted((PACKAGE / part).glob("*.py")):
        wrong = parts(imports(path)) - ALLOWED[part] - COMMON - {part} - {"__version__"}
        assert not wrong, f"{path.name} imports {wrong}"


@pytest.mark.parametrize("part", ENGINE_SIDE)
def test_the_engine_knows_nothing_of_the_web_or_the_database(part: str) -> None:
    for path in (PACKAGE / part).glob("*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & WEB_PACKAGES, path.name


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys; print(' '.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_page_keeping_needs_no_torch(name: str) -> None:
    assert "torch" not in loaded_by(f"import localpaged.engine.{name}")


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = loaded_by("import localpaged; localpaged.SamplingParams(n=4)")
    assert not loaded & {"torch", "transformers", "gradio", "numpy", "fastapi"}


def test_the_server_process_needs_no_torch() -> None:
    code = "import warnings; warnings.simplefilter('ignore'); import localpaged.server.serve, localpaged.ui.page"
    assert "torch" not in loaded_by(code)
