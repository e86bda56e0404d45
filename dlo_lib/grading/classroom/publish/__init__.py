"""What a class gets: a proved lab, slides; and a class to try everything with.

- ``publication``: publishes a proved lab
- ``slides``: slides from a notebook
- ``formulas``: formulas as pictures
- ``demo_class``: a fictitious class that uses all of this

Imports ``gradebook``, ``lab``, ``roster`` and ``sandbox``.
"""
