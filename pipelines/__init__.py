"""The stages of the pipeline and what they share. Importing it switches off the usage reports of the libraries used."""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
