"""One rank of a simulation: python -m knapformer.simulator SETTINGS_JSON, started by launch.py.

Exits with 1 after handing the reason to whoever started the rank; no traceback of its own.
"""

import sys

from knapformer.simulator.launch import fail, leave
from knapformer.simulator.settings import SimulationSettings

if __name__ == "__main__":
    try:
        # Inside, so that a broken installation is reported like any other failure.
        from knapformer.simulator.worker import run_rank

        run_rank(SimulationSettings.from_json(sys.argv[1]))
    except BaseException as error:
        fail(error)
    leave(0)
