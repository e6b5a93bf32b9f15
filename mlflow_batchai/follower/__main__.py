"""``python -m mlflow_batchai.follower SHARE FOLDER RUN``."""

import sys

from mlflow_batchai.follower.follower import main

sys.exit(main())
