"""Platforms: presets and TOML files that describe a cluster."""

from spawnsim.models.platform.files import DEFAULT, Cores, Platform, list_platforms, load_platform, to_toml

__all__ = ["Platform", "Cores", "load_platform", "list_platforms", "to_toml", "DEFAULT"]
