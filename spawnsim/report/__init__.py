"""Reports of finished runs: an HTML page (`page`), and Chrome/Perfetto JSON for trace viewers (`perfetto`)."""
