"""Platforms: presets and TOML files that describe a cluster.

This room knows how a cluster is written down. It must not know what runs on it.
"""

from spawnsim.virtual.platform.files import DEFAULT, list_platforms, load_platform
from spawnsim.virtual.platform.model import Platform
from spawnsim.virtual.platform.writing import to_toml

__all__ = ["Platform", "load_platform", "list_platforms", "to_toml", "DEFAULT"]
