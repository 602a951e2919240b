"""Recording what agents ask of a server: a proxy that passes everything through, and what it writes down."""
