from forerun.cli.main import main

main()
