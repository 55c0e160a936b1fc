"""Contract suites and made-up problems, for us and for authors of plug-ins."""
