"""The report: what `make bench` measured, as Markdown and drawings."""
