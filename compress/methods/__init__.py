"""Methods of the literature as pure functions of arrays: no models, no files, no printing."""
