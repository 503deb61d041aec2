"""Print the path of a program that tests need: find_program.py chromium|nginx [--install]

Looks at $CHROMIUM or $NGINX, then for the usual names on PATH and where systems keep servers. With --install, fetches
Debian's package if none is there. Exit status 2 with a clear message when there is none.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

ELSEWHERE = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")


@dataclass(frozen=True)
class Program:
    """names: of its file. package: Debian's. need: what goes without it, and what to do."""

    names: tuple[str, ...]
    package: str
    need: str


PROGRAMS = {
    "chromium": Program(
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
        "chromium",
        "No Chromium was found, and the browser tests need one. Install Chromium or Chrome, or set CHROMIUM to"
        " its path; to leave those tests out run: make test-fast",
    ),
    "nginx": Program(
        ("nginx",),
        "nginx",
        "No nginx was found, so the tests of streams through a proxy are left out. Install it, or set NGINX to its"
        " path.",
    ),
}


def find(name: str) -> str | None:
    """The path of a program, or None."""
    if named := os.environ.get(name.upper()):
        return shutil.which(named)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *ELSEWHERE])
    return next((found for one in PROGRAMS[name].names if (found := shutil.which(one, path=path))), None)


def install(package: str) -> None:
    """Install Debian's package; needs root and apt-get."""
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", package]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


def main(arguments: list[str]) -> int:
    name = next((argument for argument in arguments if argument in PROGRAMS), None)
    if name is None:
        print(f"Give the name of a program: {' or '.join(PROGRAMS)}.", file=sys.stderr)
        return 2
    path, variable = find(name), name.upper()
    if path is None and os.environ.get(variable):
        print(f"{variable} is {os.environ[variable]!r}, which cannot be run. Correct or unset it.", file=sys.stderr)
        return 2
    if path is None and "--install" in arguments and shutil.which("apt-get") and os.geteuid() == 0:
        try:
            install(PROGRAMS[name].package)
        except subprocess.CalledProcessError as error:
            print(f"Installing {name} failed: {' '.join(error.cmd)}", file=sys.stderr)
        path = find(name)
    if path is None:
        print(PROGRAMS[name].need, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
