"""`python -m tenuto.cli`."""

from tenuto.cli import main

raise SystemExit(main())
