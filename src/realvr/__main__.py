from realvr.cli import main

raise SystemExit(main())
