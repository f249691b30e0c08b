"""Reports: what a run's folder holds, as files and pictures.

Reads plain records and knows nothing of engines.
May import: api (through the package) and layer 0.
"""
