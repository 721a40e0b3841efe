"""The project's benchmarks: a folder for each, named as in ``pipetransformer bench NAME``, run by its ``__main__.py``.

Their results lie together in ``results/``: one place that ``--output`` replaces, and that does not make a commit dirty.

Note: Python puts a script's folder in front of its path, so that what lies beside a ``__main__.py`` hides modules of
the same name: no name there is one that anybody imports.
"""
