"""Scripts of ranks for the console command: ``python FILE.py RESULT ...`` under torchrun (``commands/ranks.py``).

Note: Python puts a script's folder in front of its path, so that its neighbours hide modules of the same name. Nothing
else lies here, and no name here is one that anybody imports.
"""
