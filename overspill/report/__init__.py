"""Reports: what a run's folder holds, as files and pictures.

run.py is the folder of a run, plot.py its picture. Reads plain records and knows nothing of engines.
May import: api (through the package) and layer 0.
"""
