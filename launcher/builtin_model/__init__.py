"""The built-in model: a checkpoint in Hugging Face layout with the scripts that trained it.

Only :data:`DIRECTORY` is for run time; the training scripts here are never imported by the server.
"""

from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
SERVED_NAME = "phalanx-demo"
