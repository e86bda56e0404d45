"""The collection of a lab, so that no file is lost.

- ``collection``: collects a lab
- ``arrivals``: submissions from the exchange, a folder or a zip
- ``receipt``: the hash of a submission

Imports ``gradebook``, ``judge``, ``lab`` and ``roster``.
"""
