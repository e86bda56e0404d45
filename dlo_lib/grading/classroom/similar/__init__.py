"""Similar submissions of a class.

- ``similarity``: lists them
- ``fingerprints``: what two texts share
- ``matching``: compares fingerprints
- ``hidden_code``: code that cannot be compared

Imports ``gradebook``, ``judge``, ``lab`` and ``roster``.
"""
