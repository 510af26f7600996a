"""How ranks tell each other metrics and models: messages, windows, means over a group, and replacements."""
