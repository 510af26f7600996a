"""Platforms: presets and TOML files that describe a cluster."""

from spawnsim.virtual.platform.files import DEFAULT, Platform, list_platforms, load_platform, to_toml

__all__ = ["Platform", "load_platform", "list_platforms", "to_toml", "DEFAULT"]
