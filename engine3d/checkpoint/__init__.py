"""Checkpoints: a model's complete state on disk, in files that do not depend on the layout that wrote them.

A checkpoint is a directory, `step-00000012`. What its manifest lists is all there is of it, and the manifest is written
last: without it there is no checkpoint, whatever else lies there.
"""
