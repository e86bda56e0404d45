"""Generation of text by a trained model.

The room imports ``base`` and ``models``.
"""
