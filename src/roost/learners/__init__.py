"""Update rules: how a policy changes after what it tried."""
