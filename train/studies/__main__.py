"""``python -m train.studies NAME``: see ``study.py``."""

import sys

from train.studies.study import main

sys.exit(main())
