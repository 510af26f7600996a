"""Exchange of metrics and models between ranks: messages, windows, means over a group, and replacements."""
