"""`python -m tenuto`."""

from tenuto.cli import main

raise SystemExit(main())
