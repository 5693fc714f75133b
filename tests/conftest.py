"""What all tests share: real servers, by plugins of their own."""

pytest_plugins = ["fixtures.broker", "fixtures.database"]
