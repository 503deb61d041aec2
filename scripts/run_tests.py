"""Run every test in two processes side by side; with arguments, run pytest with them: python scripts/run_tests.py.

One process has the tests that start servers and browsers and so wait a lot, the other has the rest. Within each the
order is pytest's own. Exit status 1 when a test failed in either.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAITING = "browser or slow"
PYTEST = [sys.executable, "-m", "pytest"]
# Compiles what every engine needs, so that the first test that starts one does not wait for that.
WARM_UP = [sys.executable, "-m", "localpaged", "bench", "2:300:3"]
# As tests/conftest.py has it.
HOME = Path(tempfile.gettempdir()) / f"localpaged-tests-{os.getuid()}"


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([*PYTEST, *sys.argv[1:]])
    begun_at = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        rest = subprocess.Popen([*PYTEST, "-m", f"not ({WAITING})"])
        processes = [rest]
        try:
            environment = os.environ | {"LOCALPAGED_HOME": str(HOME), "OMP_WAIT_POLICY": "passive"}
            subprocess.run(WARM_UP, env=environment, stdout=output, stderr=output)
            waiting = subprocess.Popen([*PYTEST, "-m", WAITING], stdout=output, stderr=output)
            processes.append(waiting)
            rest.wait()
            print(f"These took {time.monotonic() - begun_at:.0f} s; waiting for those with servers and browsers")
            waiting.wait()
        finally:
            for process in processes:
                process.kill()
        output.seek(0)
        print(output.read())
    print(f"All tests: {time.monotonic() - begun_at:.0f} s")
    return 1 if rest.returncode or waiting.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
