"""The model zoo: a tiny model of every class in transformers' auto-mappings, trained managed and plain.

``mappings`` lists the classes, ``configs`` shrinks a config, ``inputs`` makes a batch, ``runner`` trains one class both
ways and compares every bit, ``sweep`` does so for many, each in a process of its own, ``table`` writes what came out.
``tests/hunts/model_zoo.py`` is the command, ``tests/train/test_model_zoo.py`` the suite's share.
"""
