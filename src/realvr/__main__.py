"""``python -m realvr`` is ``realvr``, also for the processes that a launcher starts."""

from realvr.cli import main

raise SystemExit(main())
