"""Blocks of Python are cells: a magic or a command of the shell in them is no error."""

from ipython_pygments_lexers import IPython3Lexer


def setup(app) -> dict:
    """Read blocks of Python with the lexer of IPython."""
    app.add_lexer("python", IPython3Lexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
