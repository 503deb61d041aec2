"""Run every test in two processes side by side; with arguments, run pytest with them: python scripts/run_tests.py.

One process has the tests that start servers and browsers and so wait a lot, the other has the rest. Within each the
order is pytest's own. Exit status 1 when a test failed in either.
"""

import subprocess
import sys
import tempfile
import time

WAITING = "browser or slow"
PYTEST = [sys.executable, "-m", "pytest"]


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([*PYTEST, *sys.argv[1:]])
    begun_at = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        waiting = subprocess.Popen([*PYTEST, "-m", WAITING], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*PYTEST, "-m", f"not ({WAITING})"])
            print(f"The rest took {time.monotonic() - begun_at:.0f} s; waiting for the servers' and browsers' tests")
            waiting_status = waiting.wait()
        finally:
            waiting.kill()
        output.seek(0)
        print(output.read())
    print(f"All tests: {time.monotonic() - begun_at:.0f} s")
    return 1 if status or waiting_status else 0


if __name__ == "__main__":
    sys.exit(main())
