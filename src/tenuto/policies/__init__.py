"""One file per policy; the file's name is the policy's name. Policies never import each other.

Files that begin with an underscore hold base classes. Presets are in `tenuto.core.loader`.
"""
