"""Operations of a step that need no step: scores, columns of models, corrections and updates."""
