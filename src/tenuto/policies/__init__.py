"""One file per policy; the file's name is the policy's name. Policies never import each other."""
