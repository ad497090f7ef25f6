"""report.html: a run, or several in comparison, as one page that needs no server and no network."""
