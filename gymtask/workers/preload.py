"""What the fork server imports once for all workers: numpy, gymnasium, the worker's code.

One compute thread for each worker, unless the user's environment variables say otherwise: they must
be set before numpy loads its linear algebra library.
"""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import gymtask.workers.worker_main  # noqa: E402, F401
