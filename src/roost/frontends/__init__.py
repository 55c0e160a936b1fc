"""Model -> Graph: one file per framework, loaded when it is used."""
