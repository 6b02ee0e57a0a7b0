"""The stages of the pipeline and what they share.

Importing it, before torch, switches off the usage reports of the libraries used, and lets threads that wait for one
another sleep soon: those of GNU OpenMP would spin, and on a machine that also does other work everything would take
up to three times as long (a training step on two cores beside another; alone it makes no difference).
"""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
