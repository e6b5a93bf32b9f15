"""``python -m mlflow_batchai.follower SOCKET INODE``."""

import sys

from mlflow_batchai.follower.service import main

sys.exit(main())
