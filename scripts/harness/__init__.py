# SPDX-License-Identifier: MIT
"""What the measuring scripts share: servers, load, kernel cases, quality, test models, reports.

Workers run as ``python -m harness.<module>``, and vLLM's processes import from here as well: they
find this package by PYTHONPATH, which they inherit.
"""

import os
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parent.parent)
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _FOLDER not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, _PATHS)])
