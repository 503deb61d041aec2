"""Print the path of a Chromium that the browser tests can drive; with --install, fetch Debian's if none is there.

Looks at $CHROMIUM, then at the usual names on PATH. Exit status 2 with a clear message when there is none.
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The path of a Chromium, or None."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def install() -> None:
    """Install Debian's package; needs root and apt-get."""
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


def main() -> int:
    path = find()
    if path is None and os.environ.get("CHROMIUM"):
        print(f"CHROMIUM is {os.environ['CHROMIUM']!r}, which cannot be run. Correct or unset it.", file=sys.stderr)
        return 2
    if path is None and "--install" in sys.argv[1:] and shutil.which("apt-get") and os.geteuid() == 0:
        try:
            install()
        except subprocess.CalledProcessError as error:
            print(f"Installing chromium failed: {' '.join(error.cmd)}", file=sys.stderr)
        path = find()
    if path is None:
        print(
            "No Chromium was found, and the browser tests need one. Install Chromium or Chrome, or set CHROMIUM to"
            " its path; to leave those tests out run: make test-fast",
            file=sys.stderr,
        )
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
